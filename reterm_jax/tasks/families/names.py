"""Words that tasks are made of: lowercase, no word in two pools, none a command, so that each is one plain token."""

NOUNS = (
    "agenda", "atlas", "budget", "diary", "guide", "invoice", "journal", "ledger",
    "letter", "memo", "menu", "notes", "poem", "recipe", "report", "ticket",
)  # fmt: skip
PLACES = ("attic", "barn", "cellar", "depot", "garage", "locker", "office", "vault")
COLORS = ("amber", "blue", "coral", "green", "ivory", "olive", "scarlet", "teal")
KEYS = ("label", "mode", "owner", "theme")
TOOLS = ("carve", "grind", "mend", "paint", "polish", "stamp")
SCRIPTS = ("build", "collect", "deploy", "gather", "publish", "refresh")
EXTENSIONS = ("doc", "log", "old")
SUFFIXES = ("copy", "orig", "save")
