import time


def wait_for_the_others():
    while True:
        time.sleep(0.01)
