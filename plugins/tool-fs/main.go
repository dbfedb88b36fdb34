// Tool-fs lets a model work on text files: it registers the tools read, write and edit.
package main

import "github.com/cordon-host/cordon/plugin"

func main() { plugin.Main(Plugin) }
