//! The radix tree: maps token prefixes to the pages that hold their KV.
//!
//! Invariant: the tree has only full pages, each once, and never evicts a locked path.
//!
#![doc = include_str!("README.md")]

mod display;
mod evict;
mod insert;
mod integrity;
mod slab;
mod walk;

use crate::pages::PageId;
use slab::{Node, Slab};
use std::collections::{BTreeSet, HashSet};
use tilewright::{Result, ensure};

pub use insert::Insertion;
pub use slab::NodeId;

/// The slot of the root, which is never removed.
const ROOT: usize = 0;

/// A prefix tree over token ids with page granularity; see the [module](self). Its [`Display`](std::fmt::Display) draws it.
#[derive(Debug)]
pub struct RadixTree {
    page_size: usize,
    /// The root's access time is the clock: it counts matches and insertions.
    nodes: Slab,
    /// All pages of the tree, to reject duplicates.
    pages: HashSet<PageId>,
    /// Unlocked leaves as (last access, index), the least recently used first.
    candidates: BTreeSet<(u64, usize)>,
    num_evictable: usize,
}

/// The longest cached prefix of some tokens, in full pages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Prefix {
    /// The pages of the prefix, in order. The tree owns them: [`RadixTree::lock`] `node` before reading them. The lock
    /// fails if any of them was evicted since.
    pub pages: Vec<PageId>,
    /// The node at the end of the prefix; the root for an empty one.
    pub node: NodeId,
    num_tokens: usize,
}

impl Prefix {
    /// The length of the prefix in tokens, a multiple of the page size.
    pub fn num_tokens(&self) -> usize {
        self.num_tokens
    }
}

impl RadixTree {
    /// An empty tree for pages of `page_size` tokens.
    ///
    /// # Errors
    /// When `page_size` is 0.
    pub fn new(page_size: usize) -> Result<Self> {
        ensure!(page_size > 0, "radix.new", "page_size = 0 is not at least 1");
        let mut nodes = Slab::default();
        nodes.add(Node::default());
        Ok(Self { page_size, nodes, pages: HashSet::new(), candidates: BTreeSet::new(), num_evictable: 0 })
    }

    /// The longest cached prefix of `tokens`, in full pages.
    ///
    /// **This modifies the tree**, though not its contents: it updates the access time of the path and splits an edge if
    /// the match ends inside it, so that a node identifies the prefix. It locks nothing.
    ///
    /// A request must compute at least one token, so it passes its tokens without the last.
    pub fn match_prefix(&mut self, tokens: &[u32]) -> Prefix {
        let end = self.walk(tokens);
        let node = self.ensure_node(&end);
        let num_tokens = end.pages.len() * self.page_size;
        Prefix { pages: end.pages, node: self.nodes.id(node), num_tokens }
    }

    /// Tokens per page.
    pub fn page_size(&self) -> usize {
        self.page_size
    }

    /// The number of pages in the tree.
    pub fn num_pages(&self) -> usize {
        self.pages.len()
    }

    /// The number of unlocked pages: the maximum that [`evict`](Self::evict) returns.
    pub fn num_evictable(&self) -> usize {
        self.num_evictable
    }
}
