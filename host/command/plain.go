package command

import "regexp"

// packages are the names of packages that their errors begin with, for developers.
var packages = regexp.MustCompile(`(^|[:;] |\n)(?:(?:bench|budget|capacity|catalog|chunk|client|config|doctor|fsck|gds|host|` +
	`kvhost|meter|minisign|policy|regular|replay|sandbox|server|sim|staging|store|trace|transfer|web): )+`)

// plainError is an error's text without the names of packages.
func plainError(err error) string { return packages.ReplaceAllString(err.Error(), "$1") }
