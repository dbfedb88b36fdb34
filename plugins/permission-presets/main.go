// Permission-presets names pairs of a sandbox mode and an approval policy: it provides the capability permission.
package main

import "github.com/cordon-host/cordon/plugin"

func main() { plugin.Main(Plugin) }
