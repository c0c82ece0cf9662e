// Package proto is the session protocol on the wire: the messages and the service of kvhost.v1, and what both ends must
// agree on beside them (how namespaces and keys are encoded, what travels on the descriptor socket).
//
// The one idea: a session is one stream, and everything a client can ask for is one message on it, answered under the
// message's id. kvhost/v1/kvhost.proto is the text of the contract. The .pb.go files are generated from it.
package proto

//go:generate sh generate.sh
