"""What every benchmark needs: ranks, clocks, memory, statistics, results files and their tables."""
