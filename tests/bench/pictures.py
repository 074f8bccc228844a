"""What the programs share that draw with matplotlib."""
import sys


def pyplot(program):
    """Returns matplotlib's pyplot, which writes files and keeps letters as letters; ends with a sentence where it is not installed."""
    try:
        import matplotlib
    except ImportError:
        sys.exit(f"{program}: needs matplotlib: pip install matplotlib")
    matplotlib.use("Agg")
    matplotlib.rcParams["svg.fonttype"] = "none"  # letters, not their outlines
    import matplotlib.pyplot
    return matplotlib.pyplot
