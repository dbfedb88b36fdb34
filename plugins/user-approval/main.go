// User-approval asks people whether something may happen: it provides the capability approval.
package main

import "github.com/cordon-host/cordon/plugin"

func main() { plugin.Main(Plugin) }
