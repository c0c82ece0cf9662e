package store

import (
	"errors"

	"github.com/kvhost/kvhost/host/internal/store/capacity"
	"github.com/kvhost/kvhost/host/internal/store/catalog"
	"github.com/kvhost/kvhost/host/internal/store/entries"
	"github.com/kvhost/kvhost/host/internal/store/files"
	"github.com/kvhost/kvhost/host/internal/store/health"
)

// Errors of stores.
var (
	// ErrResident means that the piece exists already or is being written by another put.
	ErrResident = entries.ErrResident
	// ErrRefused means that the admit policy does not want the entry.
	ErrRefused = errors.New("store: admission refused")
	// ErrNoSpace means that the evict policy freed too little, so that the store was shed.
	ErrNoSpace = capacity.ErrNoSpace
	// ErrRootOut means that the root, or every root, is out of service at present.
	ErrRootOut = health.ErrOut
	// ErrSync means that the piece could not be made durable and was dropped.
	ErrSync = files.ErrSync
	// ErrShort means that a piece was published before all of it was written.
	ErrShort = errors.New("store: piece is not written to its end")
	// errAllocating means that a root in memory will have room for the entry when its memory is allocated.
	errAllocating = errors.New("store: memory is being allocated")
	// ErrPutOver means that the put was already published or aborted.
	ErrPutOver = errors.New("store: put is over")
)

// Errors of loads.
var (
	// ErrLeaseOver means that the lease was released or never covered the key.
	ErrLeaseOver = errors.New("store: lease is over")
	// ErrGone means that the entry or its file has disappeared. The entry is dropped.
	ErrGone = errors.New("store: entry is gone")
)

// Errors of the store as a whole.
var (
	// ErrRootBusy means that another host has locked the root.
	ErrRootBusy = files.ErrBusy
	// ErrConfig means that the configuration is not valid.
	ErrConfig = errors.New("store: bad configuration")
	// ErrUnknownNamespace means that the namespace was not opened, or that it lacks the group or rank.
	ErrUnknownNamespace = catalog.ErrUnknownNamespace
	// ErrNoPolicy means that no policy with that name has the role.
	ErrNoPolicy = catalog.ErrNoPolicy
	// ErrClosed means that the store was closed.
	ErrClosed = errors.New("store: closed")
)
