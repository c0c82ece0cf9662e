package store

import (
	"errors"

	"github.com/kvhost/kvhost/host/internal/store/capacity"
	"github.com/kvhost/kvhost/host/internal/store/catalog"
	"github.com/kvhost/kvhost/host/internal/store/entries"
	"github.com/kvhost/kvhost/host/internal/store/files"
	"github.com/kvhost/kvhost/host/internal/store/health"
)

// A store is not made.
var (
	// ErrResident says that the piece is there already, or is being written by another put.
	ErrResident = entries.ErrResident
	// ErrRefused says that the admission policy does not want the entry.
	ErrRefused = errors.New("store: admission refused")
	// ErrNoSpace says that the evict policy freed too little: the store is shed.
	ErrNoSpace = capacity.ErrNoSpace
	// ErrRootOut says that the root, or each of them, is out of service at present.
	ErrRootOut = health.ErrOut
	// ErrSync says that the piece could not be made durable; it is dropped.
	ErrSync = files.ErrSync
	// ErrShort says that a piece was published before all of it was written.
	ErrShort = errors.New("store: piece is not written to its end")
	// errAllocating says that a root in memory will have room for the entry, and has not yet.
	errAllocating = errors.New("store: memory is being allocated")
	// ErrPutOver says that the put was published or aborted before.
	ErrPutOver = errors.New("store: put is over")
)

// A load fails.
var (
	// ErrLeaseOver says that the lease was released, or never covered the key.
	ErrLeaseOver = errors.New("store: lease is over")
	// ErrGone says that the entry or its file vanished; the entry is dropped.
	ErrGone = errors.New("store: entry is gone")
)

// The store as a whole.
var (
	// ErrRootBusy says that another host has the root.
	ErrRootBusy = files.ErrBusy
	// ErrConfig is a configuration that cannot be.
	ErrConfig = errors.New("store: bad configuration")
	// ErrUnknownNamespace is a request for a namespace that was not opened, or for a group or rank that the namespace
	// lacks.
	ErrUnknownNamespace = catalog.ErrUnknownNamespace
	// ErrNoPolicy says that no policy of that name has the role.
	ErrNoPolicy = catalog.ErrNoPolicy
	// ErrClosed says that the store was closed.
	ErrClosed = errors.New("store: closed")
)
