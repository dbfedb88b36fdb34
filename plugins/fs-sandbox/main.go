// Fs-sandbox provides the fs capability on this host's disks, fenced by the session's file policy.
package main

import "github.com/cordon-host/cordon/plugin"

func main() { plugin.Main(Plugin) }
