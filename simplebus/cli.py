import sys, trio
from simplebus.core.broker import Settings
from simplebus.server.serve import *
def main():
    configure_logging("info")
    port=int(sys.argv[sys.argv.index("--port")+1]) if "--port" in sys.argv else 8888
    trio.run(serve, Settings(), ServeOptions(port=port,verbose="--verbose" in sys.argv))
