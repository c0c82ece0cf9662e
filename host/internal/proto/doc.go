// Package proto is the session protocol on the wire: the messages and the service of kvhost.v1, and what both ends
// must agree on besides (the encoding of namespaces and keys, and the descriptor socket).
//
// A session is one stream. Every request is one message on it, answered under the message's id.
// kvhost/v1/kvhost.proto is the contract; the .pb.go files are generated from it.
package proto

//go:generate sh generate.sh
