//! LRU eviction of pages, and locks that protect the prefix of a running request from it.
//!
//! Invariants: the candidates are exactly the unlocked leaves. A node is never newer than its parent, and a locked node has
//! a locked parent, so the oldest candidate is the oldest unlocked node of the tree. A node's path locks are its own locks plus
//! the path locks of its children. An unlocked node therefore has no locked descendant, and bottom-up eviction never reaches a
//! locked node.

use super::{RadixTree, slab::NodeId};
use crate::pages::PageId;
use tilewright::{Error, Result, ensure};

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

impl RadixTree {
    /// Protects `node` and its ancestors from eviction until [`unlock`](Self::unlock). Locks are counted.
    ///
    /// # Errors
    /// When the node is not, or no longer, in the tree.
    pub fn lock(&mut self, node: NodeId) -> Result<()> {
        let index = self.find("radix.lock", node)?;
        self.remove_candidate(index);
        self.nodes[index].own_locks += 1;
        let mut at = Some(index);
        while let Some(index) = at {
            let node = &mut self.nodes[index];
            if node.path_locks == 0 {
                self.num_evictable -= node.pages.len();
            }
            node.path_locks += 1;
            at = node.parent;
        }
        Ok(())
    }

    /// Releases one [`lock`](Self::lock) of exactly this node. The access time is unchanged.
    ///
    /// # Errors
    /// When the node is not in the tree or has no lock of its own; the tree is unchanged then.
    pub fn unlock(&mut self, node: NodeId) -> Result<()> {
        let index = self.find("radix.unlock", node)?;
        ensure!(self.nodes[index].own_locks > 0, "radix.unlock", "{node} is not locked");
        self.nodes[index].own_locks -= 1;
        let mut at = Some(index);
        while let Some(index) = at {
            let node = &mut self.nodes[index];
            node.path_locks -= 1;
            if node.path_locks == 0 {
                self.num_evictable += node.pages.len();
            }
            at = node.parent;
        }
        self.add_candidate(index);
        Ok(())
    }

    /// The slot of a node id.
    fn find(&self, operator: &'static str, node: NodeId) -> Result<usize> {
        let missing = || Error::new(operator, format!("{node} is not, or no longer, in the tree"));
        self.nodes.find(node).ok_or_else(missing)
    }
}
