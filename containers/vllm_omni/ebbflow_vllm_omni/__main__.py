"""``python -m ebbflow_vllm_omni SOCKET PARENT``: see ``ebbflow_vllm_omni.server.main``."""

import sys

from ebbflow_vllm_omni.server import main

if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
