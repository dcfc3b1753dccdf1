"""A network lab on one machine: hosts as network namespaces with shaped links. See lab.py."""
