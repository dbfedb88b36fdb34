package process

// Inherited are the variables of the host that reach a plugin.
var Inherited = inherited
