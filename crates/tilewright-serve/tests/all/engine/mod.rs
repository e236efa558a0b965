//! The engine's determinism: the output of a request depends only on the request.
//!
//! | | |
//! |---|---|
//! | [`invariants`] | batch peers, chunks, preemption, page sizes, threads, dtypes |
//! | [`reuse`] | prefix reuse |
//! | [`forks`] | several continuations of one prompt |
//! | [`requests`] | end of requests, reports, and error texts |
//! | [`damage`] | NaN weights |
//! | [`soak`] | random combinations of all of these |

mod damage;
mod forks;
mod invariants;
mod requests;
mod reuse;
pub(crate) mod session;
mod soak;
