"""The texts of the longer answers: short explanations and story plots."""

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
