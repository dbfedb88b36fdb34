// Shell-sandbox runs shell commands confined: it provides the capability shell.
package main

import "github.com/cordon-host/cordon/plugin"

func main() { plugin.Main(Plugin) }
