"""Print what pyproject.toml lists, for pip install -r: the dependencies, or with an argument, those of that extra."""

import sys
import tomllib

with open("pyproject.toml", "rb") as f:
    project = tomllib.load(f)["project"]
print("\n".join(project["optional-dependencies"][sys.argv[1]] if len(sys.argv) > 1 else project["dependencies"]))
