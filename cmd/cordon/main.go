// Command cordon hosts a deployment of plugins and is its command line.
package main

import (
	"os"

	"github.com/cordon-host/cordon/host/front/cli"
)

func main() { os.Exit(cli.Main()) }
