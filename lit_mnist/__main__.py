"""`python -m lit_mnist`, for launchers that start a module: `torchrun -m lit_mnist fit ...`."""

from lit_mnist import main

main()
