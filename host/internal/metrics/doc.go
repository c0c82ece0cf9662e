// Package metrics exports a host's figures to Prometheus. Nothing is counted here: a collector reads the statistics of
// the store, the transfer engine and the server when it is scraped. Tables map a metric's name and help to the figure
// it shows.
package metrics
