"""Word lists the questions draw from: plain data."""

from __future__ import annotations


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
