"""Web services that ask Triton about pictures: FastAPI, Django, gunicorn's workers.

Owns the one thing that must be so before OpenCV is loaded: a file of a few kilobytes
may claim to be a picture of gigabytes, and OpenCV reads its limit when it is imported.
"""

import os

MAX_PIXELS = 32 << 20

os.environ.setdefault("OPENCV_IO_MAX_IMAGE_PIXELS", str(MAX_PIXELS))
