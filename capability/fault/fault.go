// Package fault is how errors keep their identity across processes.
//
// A fault is a gRPC status with a google.rpc.ErrorInfo detail: a code for transports, a reason for programs
// (SANDBOX_UNAVAILABLE, NO_SESSION, …) and a message for people. Reasons are part of a capability's contract; messages are not,
// except where a package documents one as an interface fact.
package fault

import (
	"errors"
	"fmt"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/protoadapt"
)

// Domain is the ErrorInfo domain of every fault.
const Domain = "cordon"

// New makes a fault. The message follows fmt.Sprintf.
func New(code codes.Code, reason, format string, args ...any) error {
	return With(code, reason, fmt.Sprintf(format, args...))
}

// With makes a fault that carries further status details.
func With(code codes.Code, reason, message string, details ...protoadapt.MessageV1) error {
	all := append([]protoadapt.MessageV1{&errdetails.ErrorInfo{Reason: reason, Domain: Domain}}, details...)
	st, err := status.New(code, message).WithDetails(all...)
	if err != nil {
		// Only codes.OK or a message that cannot be marshalled gets here: a mistake in the caller.
		panic(fmt.Sprintf("fault: %v", err))
	}
	return st.Err()
}

// Reason is the reason of a fault, looked for through wrapped errors; empty for any other error.
func Reason(err error) string {
	var info *errdetails.ErrorInfo
	if Detail(err, &info) && info.GetDomain() == Domain {
		return info.GetReason()
	}
	return ""
}

// Message is the text of an error without the transport's "rpc error" prefix.
func Message(err error) string {
	if st, ok := asStatus(err); ok {
		return st.Message()
	}
	return err.Error()
}

// Detail finds the first status detail of type T in err or what it wraps, and stores it in into.
func Detail[T any](err error, into *T) bool {
	st, ok := asStatus(err)
	if !ok {
		return false
	}
	for _, d := range st.Details() {
		if t, ok := d.(T); ok {
			*into = t
			return true
		}
	}
	return false
}

func asStatus(err error) (*status.Status, bool) {
	var g interface{ GRPCStatus() *status.Status }
	if !errors.As(err, &g) {
		return nil, false
	}
	return g.GRPCStatus(), true
}
