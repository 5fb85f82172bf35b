"""What any master in Python has to do at least: receives accounting messages by libzmq, and throws them away.

python benchmarks/peers/receiving.py PORT
"""

import sys

import zmq


def main() -> None:
    socket = zmq.Context().socket(zmq.SUB)
    socket.subscribe(b"")
    socket.bind(f"tcp://127.0.0.1:{sys.argv[1]}")
    receive = socket.recv_multipart
    while True:
        receive()


if __name__ == "__main__":
    main()
