"""Print the dependencies in pyproject.toml for pip install -r, or with arguments those of these extras."""

import sys
import tomllib

with open("pyproject.toml", "rb") as f:
    project = tomllib.load(f)["project"]
extras = [line for name in sys.argv[1:] for line in project["optional-dependencies"][name]]
print("\n".join(extras or project["dependencies"]))
