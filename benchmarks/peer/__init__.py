"""Tests of DeepSpeed and of torch under the plugin: the parts of peer_suite.py."""
