// Package minisign signs files and verifies signatures in the formats of the minisign tool, so that a vendor can use
// that tool or this host's, and an operator needs neither.
//
// A key or a signature is a line of base64 with a comment above it. A signature is Ed25519, of the file itself ("Ed",
// the old form) or of its BLAKE2b-512 ("ED", the form written here). A second signature covers the first and a trusted
// comment. Key ids say which key is meant; they prove nothing.
//
// Secret keys are read and written without a password only, as minisign does with -W. Keep them where you would keep a
// password.
package minisign
