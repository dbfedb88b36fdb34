package session

import "strings"

// reserved says who may append events of a type that begins with prefix: the row that provides the capability, or the host
// alone when it names none.
var reserved = []struct{ prefix, capability string }{
	{"sandbox/", "policy"},
	{"approval/", "approval"},
	{"permission/", "permission"},
	{"network/", "network"},
	{"turn/", ""},
	{"tool/", ""},
	{"plugin/", ""},
	{"session/", ""},
	{"prompt/", ""},
}

// Owner says who may append events of a type: host is true for the host alone, otherwise capability names the capability
// whose provider may; neither is set for a type that any plugin may declare. It also takes a prefix, as manifests have it.
func Owner(typ string) (capability string, host bool) {
	for _, r := range reserved {
		if strings.HasPrefix(typ, r.prefix) || typ+"/" == r.prefix {
			return r.capability, r.capability == ""
		}
	}
	return "", false
}
