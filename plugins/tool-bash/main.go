// Tool-bash lets a model run shell commands: it registers the tool bash.
package main

import "github.com/cordon-host/cordon/plugin"

func main() { plugin.Main(Plugin) }
