// Package testenv knows the tools that tests need besides Go: how to find each, what is tested with it, and how to get
// it.
//
// A test calls [Need] before it uses a tool. A tool that is built is built then. Without the tool the test is skipped, and says so.
// With [Require] set to 1, as continuous integration does, it fails. [Until], [Receive] and [Context] are how tests wait.
package testenv
