"""Process groups and messages between ranks, the watchdog of both, and all-reduces of our own."""
