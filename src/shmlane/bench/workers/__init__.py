"""Programs that a benchmark starts, one process a contender.

They speak JSON lines on stdin and stdout (`harness`). They import each other only by
relative names and nothing else of shmlane but its public API: `tritonclient_worker`
runs in an environment where shmlane is not installed.
"""
