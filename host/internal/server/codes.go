package server

import (
	"context"
	"errors"
	"os"

	"github.com/kvhost/kvhost/gds"
	"github.com/kvhost/kvhost/host/internal/budget"
	"github.com/kvhost/kvhost/host/internal/proto"
	"github.com/kvhost/kvhost/host/internal/store"
	"github.com/kvhost/kvhost/host/internal/transfer"
	"github.com/kvhost/kvhost/host/kv"
	"github.com/kvhost/kvhost/staging"
)

// message converts an error to its wire form.
func message(err error) *proto.Error {
	if f, ok := errors.AsType[*fault](err); ok {
		return &proto.Error{Code: f.code, Field: f.field, Message: f.text}
	}
	return &proto.Error{Code: codeOf(err), Message: err.Error()}
}

// codeOf returns the code of an error that is not the client's fault.
func codeOf(err error) proto.Code {
	for _, c := range []struct {
		is   error
		code proto.Code
	}{
		{errWaited, proto.Code_CODE_LIMIT},
		{errLeaseOver, proto.Code_CODE_LEASE_OVER},
		{errLeaseUnknown, proto.Code_CODE_UNKNOWN},
		{ErrClosing, proto.Code_CODE_CLOSING},
		{transfer.ErrCancelled, proto.Code_CODE_CANCELLED},
		{context.Canceled, proto.Code_CODE_CANCELLED},
		{budget.ErrShare, proto.Code_CODE_LIMIT},
		{store.ErrLeaseOver, proto.Code_CODE_LEASE_OVER},
		{store.ErrGone, proto.Code_CODE_DAMAGED},
		{transfer.ErrDamaged, proto.Code_CODE_DAMAGED},
		{kv.ErrChecksum, proto.Code_CODE_DAMAGED},
		{transfer.ErrBlocks, proto.Code_CODE_INVALID},
		{transfer.ErrRegion, proto.Code_CODE_INVALID},
		{transfer.ErrGeometry, proto.Code_CODE_DAMAGED},
		{transfer.ErrMemory, proto.Code_CODE_INVALID},
		{transfer.ErrDevice, proto.Code_CODE_IO},
		{staging.ErrHung, proto.Code_CODE_IO},
		{gds.ErrHung, proto.Code_CODE_IO},
		{store.ErrRootOut, proto.Code_CODE_IO},
		{transfer.ErrClosed, proto.Code_CODE_CLOSING},
		{errInboxFull, proto.Code_CODE_LIMIT},
	} {
		if errors.Is(err, c.is) {
			return c.code
		}
	}
	var path *os.PathError
	var call *os.SyscallError
	if errors.As(err, &path) || errors.As(err, &call) {
		return proto.Code_CODE_IO
	}
	return proto.Code_CODE_INTERNAL
}

// resultOf returns the result of a chunk after its reservation or job ended with err.
func resultOf(err error) proto.ChunkResult {
	switch {
	case err == nil:
		return proto.ChunkResult_CHUNK_RESULT_STORED
	case errors.Is(err, store.ErrResident):
		return proto.ChunkResult_CHUNK_RESULT_RESIDENT
	case errors.Is(err, store.ErrRefused):
		return proto.ChunkResult_CHUNK_RESULT_REFUSED
	case errors.Is(err, store.ErrNoSpace), errors.Is(err, transfer.ErrShed):
		return proto.ChunkResult_CHUNK_RESULT_SHED
	}
	return proto.ChunkResult_CHUNK_RESULT_FAILED
}

var discardResults = [...]proto.DiscardResult{
	store.DiscardAbsent:      proto.DiscardResult_DISCARD_RESULT_ABSENT,
	store.DiscardRemoved:     proto.DiscardResult_DISCARD_RESULT_REMOVED,
	store.DiscardInUse:       proto.DiscardResult_DISCARD_RESULT_IN_USE,
	store.DiscardOtherTenant: proto.DiscardResult_DISCARD_RESULT_OTHER_TENANT,
	store.DiscardUnavailable: proto.DiscardResult_DISCARD_RESULT_UNAVAILABLE,
}

// discardReply returns the answer to a DISCARD.
func discardReply(results []store.DiscardResult) *proto.DiscardReply {
	r := &proto.DiscardReply{Results: make([]proto.DiscardResult, len(results))}
	for i, result := range results {
		r.Results[i] = discardResults[result]
	}
	return r
}
