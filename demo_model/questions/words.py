"""Plain data the questions draw from: word lists, and the texts of the longer answers (explanations, story plots)."""

from __future__ import annotations

TOPICS: dict[str, str] = {
    "prefill": (
        "Prefill is the first half of answering. The model reads the whole prompt at once and stores keys "
        "and values for every token. It keeps the processor busy, and it ends with the first new token."
    ),
    "decode": (
        "Decode is the second half of answering. The model writes one token at a time, and each new token "
        "looks back at the stored keys and values. It is limited by memory speed more than by arithmetic."
    ),
    "the KV cache": (
        "The KV cache holds the keys and values of every token seen so far. Thanks to it, a new token "
        "does not need to read the whole prompt again. It grows with every token and fills the memory."
    ),
    "Tandem": (
        "Tandem is a server for language models. It runs prefill and decode on separate workers and moves "
        "the KV cache between them. Long prompts then no longer slow down the answers of other people."
    ),
    "tokens": (
        "A token is a small piece of text, such as a word, a part of a word or a digit. A language model "
        "reads tokens and writes tokens, one after another, until it decides to stop."
    ),
    "attention": (
        "Attention lets each token look at the tokens before it. It compares a query with many keys, "
        "turns the scores into weights, and adds up the values by these weights."
    ),
    "batching": (
        "Batching means to work on several requests at the same time. The weights are read once for all "
        "of them, so the server answers more people with the same machine."
    ),
    "streaming": (
        "Streaming means to send each token as soon as it is ready. You can read the start of the answer "
        "while the model is still writing the rest of it."
    ),
    "latency": (
        "Latency is the time you wait. For a language model we measure the time to the first token and "
        "the time between two tokens. Both should be short and steady."
    ),
    "throughput": (
        "Throughput is the amount of work done per second. For a language model we count the tokens of "
        "all requests together. A high throughput makes each answer cheaper."
    ),
    "speculative decoding": (
        "In speculative decoding a small draft model guesses the next few tokens. The large model checks "
        "all guesses in one step and keeps the ones it agrees with. The answer stays the same, but it "
        "arrives sooner."
    ),
    "language models": (
        "A language model guesses the next token from the tokens before it. It learns this from a lot of "
        "text. By guessing again and again it writes whole answers."
    ),
    "the sun": (
        "The sun is a star in the middle of our solar system. It gives us light and warmth. The earth "
        "travels around it once every year."
    ),
    "the moon": (
        "The moon travels around the earth in about one month. It has no light of its own and shines "
        "because the sun lights it. It moves the water of the sea and makes the tides."
    ),
    "rain": (
        "Rain is water that falls from the clouds. The sun warms the sea, the water rises into the air, "
        "cools down and forms small drops. When the drops are heavy, they fall."
    ),
    "snow": (
        "Snow is made of small crystals of ice. It forms in cold clouds and falls slowly to the ground. "
        "Each flake has six arms, and it melts when it gets warm."
    ),
    "bees": (
        "Bees are small insects that live together in a hive. They fly from flower to flower, collect "
        "sweet nectar and turn it into honey. Many plants need them to grow fruit."
    ),
    "trees": (
        "Trees are tall plants with a trunk of wood. Their roots drink water from the ground, and their "
        "leaves catch the light of the sun. They clean the air and give shade."
    ),
    "bread": (
        "Bread is made from flour, water, salt and yeast. The dough rests until it rises, and then it is "
        "baked in a hot oven. Fresh bread has a hard crust and a soft middle."
    ),
    "cats": (
        "Cats are small animals with soft fur and sharp claws. They sleep for most of the day and hunt at "
        "night. Many people keep a cat at home because cats are calm and clean."
    ),
    "dogs": (
        "Dogs are loyal animals that have lived with people for a very long time. They can hear and smell "
        "very well. They need a walk every day and love to play."
    ),
    "water": (
        "Water is clear and has no taste. It turns to ice when it is cold and to steam when it is hot. "
        "All plants and animals need water to live."
    ),
    "music": (
        "Music is made of sounds in time. A melody is a row of notes, and the rhythm tells when each note "
        "comes. People sing, dance and play instruments together."
    ),
    "computers": (
        "A computer follows a list of simple steps called a program. It keeps numbers in its memory and "
        "changes them very fast. It can write, count, draw and talk to other computers."
    ),
}

PLOTS: dict[str, str] = {
    "cat": (
        "Once upon a time there was a cat named {n}. {n} lived in a small house near the sea. One day {n} "
        "saw a bird on the roof and wanted to fly too. The bird laughed and sang a song. From then on {n} "
        "and the bird were friends."
    ),
    "dog": (
        "Once upon a time there was a dog named {n}. {n} loved to run in the fields. One evening {n} "
        "found a lost child in the forest and showed the way home. The whole village was happy and gave "
        "{n} a big bone."
    ),
    "fox": (
        "Once upon a time there was a fox named {n}. {n} was clever but always hungry. One night {n} "
        "found a garden full of grapes, but the wall was high. So {n} waited for the wind, and the grapes "
        "fell down."
    ),
    "robot": (
        "Once upon a time there was a robot named {n}. {n} could count to a thousand but could not sing. "
        "A little girl taught {n} one song. Now {n} sings every morning, and nobody minds the wrong "
        "notes."
    ),
    "dragon": (
        "Once upon a time there was a dragon named {n}. {n} was afraid of the dark. So {n} breathed a "
        "small fire every night to read a book. The people in the valley saw the light and always found "
        "their way."
    ),
    "bear": (
        "Once upon a time there was a bear named {n}. {n} looked for honey all summer long. When the "
        "winter came, {n} shared it with the bees and slept until spring. In spring the first flower was "
        "for {n}."
    ),
    "owl": (
        "Once upon a time there was an owl named {n}. {n} knew the name of every star. One night the "
        "clouds were thick, and {n} told the stars to the children instead. They slept well and dreamed "
        "of light."
    ),
    "mouse": (
        "Once upon a time there was a mouse named {n}. {n} was the smallest in the whole house. One day a "
        "key fell under the floor, and only {n} could bring it back. After that nobody laughed at {n} "
        "again."
    ),
}


def _pairs(text: str) -> dict[str, str]:
    """ "a/b c/d" as {"a": "b", "c": "d"}."""
    return dict(pair.split("/") for pair in text.split())


_COMMON = """
able about above across action again air almost alone also animal answer apple april arm art autumn
away baby back bag ball banana bank basket beach bear beautiful bed bee bell bird black blue board boat
body bone book bottle bottom box boy brain branch bread break bridge bright brother brown brush bucket
build butter button cake camel camera candle car card carpet carrot castle cat chair cheese cherry
chicken child circle city class clean clever cloud coat coffee cold colour computer cook copper corner
cotton cow cream cup curtain dance dark daughter desert desk dinner doctor dog dolphin door dragon dream
dress drink driver duck eagle ear early earth east egg elephant engine evening eye face family farm
father feather field finger fire fish flag floor flower forest fork fox friend frog fruit garden garlic
gate ghost giant giraffe girl glass glove gold grape grass green guitar hair hammer hand harbour hat
head heart helmet hill honey horse hospital hotel house hundred ice island jacket juice jungle kettle
key king kitchen kite knife ladder lake lamp language laptop leaf lemon letter library light lion lizard
machine magnet map market meadow melon memory metal milk minute mirror monkey moon morning mother
mountain mouse mouth museum music nail needle network night north nose number ocean office onion orange
orchard oven owl paint palace paper parrot party pearl pencil penguin people pepper piano picture pillow
pilot planet plant plate pocket poem potato powder prince pumpkin puzzle python queen question rabbit
radio rain rainbow ribbon rice ring river road robot rocket roof room rope rose salad salt sand school
sea season seed server shadow sheep ship shirt shoe silver sister sky sleep snail snow soap sock soup
south spider spoon spring square star station stone storm story street sugar summer sun table tandem
teacher ticket tiger token tomato tooth tower town train travel tree triangle tunnel turtle umbrella
uncle valley village violin wagon wall water whale wheat wheel white wind window winter wolf woman wood
word worker world yellow zebra
"""
COMMON_WORDS: tuple[str, ...] = tuple(_COMMON.split())

NAMES = ("Anna", "Ben", "Clara", "David", "Emma", "Felix", "Grace", "Hugo", "Iris", "Jack", "Lena", "Max")

CAPITALS: dict[str, str] = {
    "France": "Paris",
    "Germany": "Berlin",
    "Italy": "Rome",
    "Spain": "Madrid",
    "Portugal": "Lisbon",
    "Austria": "Vienna",
    "Switzerland": "Bern",
    "Belgium": "Brussels",
    "the Netherlands": "Amsterdam",
    "Denmark": "Copenhagen",
    "Sweden": "Stockholm",
    "Norway": "Oslo",
    "Finland": "Helsinki",
    "Iceland": "Reykjavik",
    "Ireland": "Dublin",
    "Poland": "Warsaw",
    "Hungary": "Budapest",
    "Greece": "Athens",
    "Egypt": "Cairo",
    "Kenya": "Nairobi",
    "Japan": "Tokyo",
    "China": "Beijing",
    "India": "New Delhi",
    "Thailand": "Bangkok",
    "Australia": "Canberra",
    "Canada": "Ottawa",
    "Mexico": "Mexico City",
    "Cuba": "Havana",
    "Peru": "Lima",
    "Chile": "Santiago",
    "Argentina": "Buenos Aires",
    "Brazil": "Brasilia",
}

_ANTONYMS = """
hot/cold big/small fast/slow light/dark happy/sad old/new open/closed full/empty high/low hard/soft
wet/dry rich/poor strong/weak loud/quiet early/late long/short thick/thin deep/shallow clean/dirty
sharp/blunt near/far right/wrong true/false heavy/light young/old day/night up/down left/right
inside/outside begin/end buy/sell push/pull love/hate win/lose always/never first/last summer/winter
"""
ANTONYMS: dict[str, str] = _pairs(_ANTONYMS)

_PLURALS = """
cat/cats dog/dogs book/books tree/trees car/cars house/houses box/boxes fox/foxes bus/buses glass/glasses
dish/dishes church/churches city/cities baby/babies story/stories berry/berries leaf/leaves wolf/wolves
knife/knives child/children mouse/mice foot/feet tooth/teeth man/men woman/women goose/geese sheep/sheep
fish/fish potato/potatoes tomato/tomatoes key/keys day/days person/people token/tokens server/servers
"""
PLURALS: dict[str, str] = _pairs(_PLURALS)

SOUNDS: dict[str, str] = _pairs("dog/woof cat/meow cow/moo duck/quack sheep/baa pig/oink lion/roar bee/buzz frog/croak")

COLOURS: dict[str, str] = _pairs(
    "grass/green snow/white coal/black blood/red lemons/yellow carrots/orange bananas/yellow"
)
