"""DeepSpeed's own tests under the plugin: the parts of peer_suite.py."""
