"""What tests of several folders share: one daemon, one pump, one scripted server, and the machine's times and needs."""
