"""Draws the pictures of README and docs: ``python docs/pictures/draw.py`` writes them anew, beside this file.

They have a ground of their own, light or dark as the reader's system is. They take their numbers from the package, from
the results of the benchmarks, or from the files that measure.py, compute.py and record.py write.
"""

from drawings import DRAWINGS
from drawings.svg import PICTURES

if __name__ == "__main__":
    for name, draw in DRAWINGS.items():
        (PICTURES / name).write_text(draw(), encoding="utf-8")
