// Sandbox-policy is the home of the sandbox mode: it provides the capability policy.
package main

import "github.com/cordon-host/cordon/plugin"

func main() { plugin.Main(Plugin) }
