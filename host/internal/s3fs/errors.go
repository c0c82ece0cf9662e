package s3fs

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"strings"

	"github.com/minio/minio-go/v7"
	"golang.org/x/sys/unix"
)

var (
	// ErrAnswer means that a server's answer does not match the request.
	ErrAnswer = errors.New("s3fs: not what was asked for")
	// ErrLapsed means that the lock was not renewed in time, so that another host may have it.
	ErrLapsed = errors.New("s3fs: the lock has lapsed")
	// ErrNotNow means that the other hosts of the bucket have excluded this one at present, so that it writes nothing.
	ErrNotNow = errors.New("s3fs: nothing is written until the other hosts count on this one again")
	// ErrConditions means that a bucket cannot be shared, because its server ignores the conditions of writes.
	ErrConditions = errors.New("s3fs: the server has no conditional writes (If-None-Match, If-Match), so the bucket cannot be shared")
	// ErrOrder means that bytes were written in front of a part that was already sent.
	ErrOrder = errors.New("s3fs: written to a part that is gone")
)

// ConfigError means that the configuration is not valid.
type ConfigError struct {
	Key  string // path, endpoint or ca_file
	Text string
}

func (e *ConfigError) Error() string { return "s3fs: " + e.Key + ": " + e.Text }

func refuse(key, format string, args ...any) error {
	return &ConfigError{key, fmt.Sprintf(format, args...)}
}

// credentialCodes are the error codes for credentials with which no request can succeed. They say nothing about one object.
const credentialCodes = " ExpiredToken InvalidToken TokenRefreshRequired InvalidAccessKeyId SignatureDoesNotMatch " +
	"RequestTimeTooSkewed RequestExpired InvalidClientTokenId "

// passing reports whether the same request may succeed later.
func passing(err error) bool {
	r := minio.ToErrorResponse(err)
	switch r.StatusCode {
	case 0, http.StatusRequestTimeout, http.StatusTooManyRequests, http.StatusConflict, http.StatusInternalServerError,
		http.StatusBadGateway, http.StatusServiceUnavailable, http.StatusGatewayTimeout:
		return !errors.Is(err, context.Canceled) && !isErrno(err)
	case http.StatusOK, http.StatusPartialContent: // an error in a body after a good status
		return true
	}
	return r.Code == "RequestTimeout" || r.Code == "SlowDown"
}

// isErrno reports whether an error is one of this package, with an errno that gives its cause.
func isErrno(err error) bool {
	return errors.Is(err, ErrOrder) || errors.Is(err, ErrLapsed) || errors.Is(err, ErrNotNow)
}

// errnoOf returns the errno for the cause of a request's error.
func errnoOf(err error, writes bool) error {
	r := minio.ToErrorResponse(err)
	switch {
	case errors.Is(err, ErrLapsed):
		return unix.ENOLINK
	case errors.Is(err, ErrNotNow):
		return unix.EAGAIN
	case errors.Is(err, ErrOrder):
		return unix.ESPIPE
	case strings.Contains(credentialCodes, " "+r.Code+" ") && r.Code != "":
		return unix.ENOTCONN
	case r.Code == "NoSuchBucket", r.StatusCode == http.StatusMovedPermanently:
		return unix.ENODEV
	case r.Code == "NoSuchUpload":
		return unix.EIO
	case r.StatusCode == http.StatusNotFound:
		return unix.ENOENT
	case r.StatusCode == http.StatusForbidden && writes, r.StatusCode == http.StatusMethodNotAllowed:
		return unix.EROFS
	case r.StatusCode == http.StatusForbidden:
		return unix.EACCES
	case r.StatusCode == http.StatusPreconditionFailed && writes:
		return unix.EEXIST
	case r.StatusCode == http.StatusPreconditionFailed, r.StatusCode == http.StatusRequestedRangeNotSatisfiable:
		return unix.ESTALE
	case r.StatusCode == http.StatusInsufficientStorage, strings.Contains(r.Code, "QuotaExceeded"):
		return unix.ENOSPC
	case errors.Is(err, context.DeadlineExceeded):
		return unix.ETIMEDOUT
	}
	return unix.EIO
}

// failed returns the error of an operation on a file.
func failed(op, name string, err error, writes bool) error {
	var path *fs.PathError
	if err == nil || err == io.EOF || errors.As(err, &path) {
		return err
	}
	return pathError(op, name, fmt.Errorf("%w (%w)", errnoOf(err, writes), err))
}

func pathError(op, name string, err error) error { return &fs.PathError{Op: op, Path: name, Err: err} }
