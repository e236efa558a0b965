//! LRU eviction of pages.
//!
//! Invariant: the candidates are exactly the unlocked leaves. A node is never newer than its parent, and a locked node has
//! a locked parent, so the oldest candidate is the oldest unlocked node of the tree.

use super::RadixTree;
use crate::pages::PageId;

impl RadixTree {
    /// Removes `count` unlocked pages from the tree, or all [`num_evictable`](Self::num_evictable) pages if there are
    /// fewer. The caller owns them and must free them.
    ///
    /// Pages are evicted by last access and, on one path, from its end. The last leaf may lose only part of its pages;
    /// the id of a node that lost a page is stale.
    #[must_use = "the caller must free the pages"]
    pub fn evict(&mut self, count: usize) -> Vec<PageId> {
        let mut evicted = Vec::with_capacity(count.min(self.num_evictable));
        while evicted.len() < count
            && let Some(&(_, leaf)) = self.candidates.first()
        {
            let remaining = count - evicted.len();
            if let Some(kept) = self.nodes[leaf].pages.len().checked_sub(remaining)
                && kept > 0
            {
                // The kept pages get a new node, so that the leaf's id becomes stale: it must not lock a shorter
                // prefix than the one it was issued for.
                self.split(leaf, kept);
            }
            evicted.extend(self.remove_leaf(leaf).into_iter().rev());
        }
        evicted
    }

    /// Removes an unlocked leaf and returns its pages.
    fn remove_leaf(&mut self, leaf: usize) -> Vec<PageId> {
        self.remove_candidate(leaf);
        let node = self.nodes.remove(leaf);
        let parent = node.parent.expect("the root is never a candidate");
        self.nodes[parent].children.remove(&node.tokens[..self.page_size]);
        self.num_evictable -= node.pages.len();
        for page in &node.pages {
            self.pages.remove(page);
        }
        self.add_candidate(parent);
        node.pages
    }

    /// Makes `node` a candidate if it is an unlocked leaf.
    pub(super) fn add_candidate(&mut self, node: usize) {
        if self.nodes[node].is_candidate() {
            self.candidates.insert((self.nodes[node].last_access, node));
        }
    }

    /// Removes `node` from the candidates; call this before a change of its access time, locks or children.
    pub(super) fn remove_candidate(&mut self, node: usize) {
        self.candidates.remove(&(self.nodes[node].last_access, node));
    }
}
