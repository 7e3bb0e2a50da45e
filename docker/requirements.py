"""Print the dependencies in pyproject.toml for pip install -r, or with arguments those of these extras.

nf4-kernels comes from this tree and is left out; an extra of it is what nf4_kernels/pyproject.toml lists under its name.
"""

import re
import sys
import tomllib


def project(file: str) -> dict:
    with open(file, "rb") as f:
        return tomllib.load(f)["project"]


server, kernels = project("pyproject.toml"), project("nf4_kernels/pyproject.toml")
extras = [line for name in sys.argv[1:] for line in server["optional-dependencies"][name]]
for line in extras or server["dependencies"]:
    ours = re.match(r"nf4-kernels(?:\[(.+)\])?", line)
    if ours is None:
        print(line)
    elif ours[1]:
        print("\n".join(kernels["optional-dependencies"][ours[1]]))
