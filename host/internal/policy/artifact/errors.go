package artifact

import "errors"

var (
	// ErrReference means that a text names no artifact, or names it by a tag where a digest is wanted.
	ErrReference = errors.New("policy: bad reference")
	// ErrManifest means that what a reference names is no policy.
	ErrManifest = errors.New("policy: not a policy's manifest")
	// ErrDigest means that bytes are not those that were named.
	ErrDigest = errors.New("policy: altered")
	// ErrAbsent means that the local store does not have an artifact.
	ErrAbsent = errors.New("policy: not in the local store")
)
