"""Words that tasks are made of: lowercase, no word in two pools, none a command, so that each is one plain token."""

NOUNS = (
    "agenda", "almanac", "atlas", "brief", "budget", "charter", "diary", "digest", "essay", "guide",
    "invoice", "journal", "ledger", "lesson", "letter", "lyrics", "manual", "memo", "menu", "notes",
    "novel", "outline", "permit", "plan", "poem", "puzzle", "quote", "recipe", "report", "review",
    "roster", "sketch", "speech", "story", "summary", "survey", "thesis", "ticket", "verse", "voucher",
)  # fmt: skip
PLACES = (
    "attic", "barn", "basket", "cabinet", "cellar", "chest", "closet", "depot", "drawer", "garage",
    "harbor", "library", "locker", "loft", "office", "pantry", "shed", "shelf", "studio", "vault",
)  # fmt: skip
COLORS = (
    "amber", "azure", "blue", "bronze", "coral", "crimson", "cyan", "green",
    "indigo", "ivory", "maroon", "olive", "purple", "scarlet", "silver", "teal",
)  # fmt: skip
KEYS = ("color", "label", "level", "mode", "owner", "region", "theme", "title")
TOOLS = ("carve", "grind", "mend", "paint", "polish", "stamp", "trim", "weave")
SCRIPTS = ("assemble", "build", "collect", "deploy", "gather", "prepare", "publish", "refresh")
EXTENSIONS = ("doc", "log", "md", "old")
SUFFIXES = ("copy", "orig", "prev", "save")
