package kernelv1

// Metadata keys of the protocol; the package's .proto says what they mean.
const (
	KeyPrefix    = "cordon-"
	KeyLeg       = "cordon-leg"
	KeyChannel   = "cordon-channel"
	KeyCaller    = "cordon-caller"
	KeyProvides  = "cordon-provides"
	KeyPurpose   = "cordon-purpose"
	KeySession   = "cordon-session"
	KeyAgent     = "cordon-agent"
	KeyTurn      = "cordon-turn"
	KeyCall      = "cordon-call"
	KeyEpoch     = "cordon-epoch"
	KeyHops      = "cordon-hops"
	KeyAuthority = "cordon-authority"
)

// PurposePin is the value of KeyPurpose in the call tree in which the host has a session's missing permission facts filled in.
const PurposePin = "pin"
