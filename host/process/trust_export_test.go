package process

// AfterCheck has fn run between the check of an executable and its execution, until the returned function is called.
func AfterCheck(fn func(path string)) (undo func()) {
	afterCheck = fn
	return func() { afterCheck = nil }
}

// Inherited are the variables of the host that reach a plugin.
var Inherited = inherited
