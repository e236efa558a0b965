//! The engine, promise by promise: what a request says depends on nothing but the request.
//!
//! | | |
//! |---|---|
//! | [`invariants`] | neighbours, chunks, preemption, page sizes, threads, dtypes |
//! | [`reuse`] | prefixes that others computed |
//! | [`forks`] | several continuations of one prompt |
//! | [`requests`] | how requests end, and what is refused |
//! | [`damage`] | weights that are not numbers |
//! | [`soak`] | all of it at random |

mod damage;
mod forks;
#[path = "../generator/mod.rs"]
mod generator;
mod invariants;
mod requests;
mod reuse;
mod session;
mod soak;
