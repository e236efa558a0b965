//! The radix tree: which token prefixes have their KV in the pool, and in which pages.
//!
//! Invariant: only whole pages are in the tree, every page once, and a locked path is never evicted.
//!
#![doc = include_str!("README.md")]

mod draw;
mod evict;
mod insert;
mod integrity;
mod lock;
mod node;
mod slab;
mod walk;

use std::collections::{BTreeSet, HashSet};

use tilewright::{Result, ensure};

use crate::pages::PageId;
pub use insert::Insertion;
use node::Node;
pub use node::NodeId;
use slab::Slab;

/// The slot of the root, which is there from the beginning to the end.
const ROOT: usize = 0;

/// A prefix tree over token ids, at the granularity of pages; see the [module](self).
///
/// Its [`Display`](std::fmt::Display) draws it.
#[derive(Debug)]
pub struct RadixTree {
    page_size: usize,
    /// The root's access time is the clock: it counts matches and insertions.
    nodes: Slab,
    /// Every page of the tree, so that none can enter twice.
    pages: HashSet<PageId>,
    /// Unlocked leaves as (last access, index), the least recently used first.
    candidates: BTreeSet<(u64, usize)>,
    num_evictable: usize,
}

/// What the tree has of some tokens: the longest prefix in whole pages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Prefix {
    /// The pages of the prefix, from the first token on. They are the tree's: to be read after
    /// [`RadixTree::lock`] of `node`, which refuses when any of them was evicted in the meantime.
    pub pages: Vec<PageId>,
    /// The node where the prefix ends; the root for an empty one.
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

    /// The longest prefix of `tokens` that the tree has, in whole pages.
    ///
    /// **This changes the tree**, though never what it holds: it renews the access time of the path, and when the
    /// match ends inside an edge it splits that edge, so that a node can name the prefix. It locks nothing.
    ///
    /// A request that must compute at least one token asks with its last token left out.
    pub fn match_prefix(&mut self, tokens: &[u32]) -> Prefix {
        let reached = self.walk(tokens);
        let node = self.settle(&reached);
        let num_tokens = reached.pages.len() * self.page_size;
        Prefix { pages: reached.pages, node: self.nodes.id(node), num_tokens }
    }

    /// Tokens in a page.
    pub fn page_size(&self) -> usize {
        self.page_size
    }

    /// How many pages the tree owns.
    pub fn num_pages(&self) -> usize {
        self.pages.len()
    }

    /// How many of its pages no lock keeps: what [`evict`](Self::evict) can give at most.
    pub fn num_evictable(&self) -> usize {
        self.num_evictable
    }
}
