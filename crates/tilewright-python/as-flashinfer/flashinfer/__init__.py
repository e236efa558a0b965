"""``tilewright.flashinfer`` under FlashInfer's name, modules included."""

import sys

import tilewright.flashinfer

sys.modules[__name__] = tilewright.flashinfer  # the import of this package returns it
tilewright.flashinfer.install()
