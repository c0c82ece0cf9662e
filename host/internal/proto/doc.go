// Package proto is the session protocol on the wire: the messages and the service of kvhost.v1, the encoding of
// namespaces and keys, and the descriptor socket.
//
// A session is one stream. Every request is one message on it, and its answers carry the message's id.
// kvhost/v1/kvhost.proto is the contract, from which the .pb.go files are generated.
package proto

//go:generate sh generate.sh
