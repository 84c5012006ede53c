//! Where a process listens: what it tells the others, and by which of its addresses they reach it.

use std::fs;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::Path;

use super::node::node;

/// Bytes in which a process says where it listens: what it is on, and its addresses.
pub(super) const PLACE_BYTES: usize = 1024;

/// Where a process listens, as it tells the others.
pub(super) struct ListeningPlace {
    /// What processes that reach each other at the loopback address have in common.
    node: String,
    addresses: Vec<IpAddr>,
    port: u16,
}

impl ListeningPlace {
    /// This process, which listens [`EVERYWHERE`] at `port`.
    pub(super) fn here(port: u16) -> ListeningPlace {
        ListeningPlace { node: node(), addresses: addresses(), port }
    }

    /// What the others are told: text of [`PLACE_BYTES`], with as many addresses as it has room for.
    pub(super) fn told(&self) -> Vec<u8> {
        let mut told = self.text().into_bytes();
        told.resize(PLACE_BYTES, b' ');
        told
    }

    fn text(&self) -> String {
        let addresses: Vec<String> = self.addresses.iter().map(IpAddr::to_string).collect();
        let text = format!("{} {} {}", self.node, self.port, addresses.join(" "));
        match text.get(..PLACE_BYTES).and_then(|text| text.rfind(' ')) {
            Some(end) => text[..end].to_owned(),
            None => text,
        }
    }

    /// What a process has told.
    pub(super) fn of_text(text: &str) -> ListeningPlace {
        let mut words = text.split_whitespace();
        let node = words.next().unwrap_or_default().to_owned();
        let port = words.next().and_then(|port| port.parse().ok()).unwrap_or_default();
        ListeningPlace { node, port, addresses: words.filter_map(|word| word.parse().ok()).collect() }
    }

    /// Where a process at `own` may reach it, what is likeliest first: networks begin alike.
    pub(super) fn from(self, own: &ListeningPlace) -> Vec<SocketAddr> {
        let at = |address| SocketAddr::new(address, self.port);
        if self.node == own.node {
            return vec![at(Ipv4Addr::LOCALHOST.into()), at(Ipv6Addr::LOCALHOST.into())];
        }
        // What this machine has too is a bridge of each machine's own.
        let mut addresses = self.addresses.clone();
        addresses.retain(|address| !own.addresses.contains(address));
        let alike = |address: &IpAddr| own.addresses.iter().map(|own| common_bits(*own, *address)).max();
        addresses.sort_by_key(|address| std::cmp::Reverse(alike(address)));
        addresses.into_iter().map(at).collect()
    }
}

fn common_bits(a: IpAddr, b: IpAddr) -> u32 {
    match (a, b) {
        (IpAddr::V4(a), IpAddr::V4(b)) => (a.to_bits() ^ b.to_bits()).leading_zeros(),
        (IpAddr::V6(a), IpAddr::V6(b)) => (a.to_bits() ^ b.to_bits()).leading_zeros(),
        _ => 0,
    }
}

/// Where to listen so that all of a machine's addresses reach it: where the system knows IPv6, that takes callers of IPv4, too.
pub(super) const EVERYWHERE: [SocketAddr; 2] =
    [SocketAddr::new(IpAddr::V6(Ipv6Addr::UNSPECIFIED), 0), SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), 0)];

/// This machine's own addresses that others may reach.
fn addresses() -> Vec<IpAddr> {
    let read = |table: &str| fs::read_to_string(Path::new("/proc/net").join(table)).unwrap_or_default();
    let (ipv4, ipv6) = (local_addresses(&read("fib_trie")), global_addresses(&read("if_inet6")));
    ipv4.into_iter().map(IpAddr::V4).chain(ipv6.into_iter().map(IpAddr::V6)).collect()
}

/// Of the kernel's table of routes: an address is on the line before the one that says that it is a host's here.
fn local_addresses(table: &str) -> Vec<Ipv4Addr> {
    let lines: Vec<&str> = table.lines().map(str::trim).collect();
    let local = lines.windows(2).filter(|pair| pair[1].contains("/32 host LOCAL"));
    let address = |pair: &[&str]| pair[0].strip_prefix("|-- ")?.parse().ok();
    let mut addresses: Vec<Ipv4Addr> =
        local.filter_map(address).filter(|address: &Ipv4Addr| !address.is_loopback()).collect();
    addresses.sort();
    addresses.dedup();
    addresses
}

/// Of the kernel's table of addresses: 32 digits, the interface's number, the length of the prefix, and the scope, which is
/// 00 for those that are more than a link's.
fn global_addresses(table: &str) -> Vec<Ipv6Addr> {
    let address = |line: &str| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let is_global = words.get(3) == Some(&"00");
        let bits = words.first().filter(|_| is_global).and_then(|digits| u128::from_str_radix(digits, 16).ok());
        bits.map(Ipv6Addr::from_bits)
    };
    let mut addresses: Vec<Ipv6Addr> = table.lines().filter_map(address).collect();
    addresses.sort();
    addresses
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};

    use super::*;

    const TABLE: &str = "Local:
  +-- 0.0.0.0/0 3 0 5
     |-- 0.0.0.0
        /0 universe UNICAST
     +-- 10.1.0.0/16 2 0 2
        |-- 10.1.0.0
           /16 link UNICAST
        |-- 10.1.2.3
           /32 host LOCAL
     |-- 127.0.0.1
        /32 host LOCAL
     |-- 192.168.7.9
        /32 host LOCAL
     |-- 192.168.7.255
        /32 link BROADCAST
";

    #[test]
    fn addresses_are_those_of_the_host() {
        let found: Vec<String> = local_addresses(TABLE).iter().map(Ipv4Addr::to_string).collect();
        assert_eq!(found, ["10.1.2.3", "192.168.7.9"]);
        let table = "fd00000000000000024240fffe112233 02 40 00 80     eth0\n\
                     00000000000000000000000000000001 01 80 10 80       lo\n\
                     fe80000000000000024240fffe112233 02 40 20 80     eth0\n";
        let found: Vec<String> = global_addresses(table).iter().map(Ipv6Addr::to_string).collect();
        assert_eq!(found, ["fd00::242:40ff:fe11:2233"]);
    }

    #[test]
    fn what_a_process_tells_is_understood() {
        let here = ListeningPlace::here(7);
        let told = here.told();
        assert_eq!(told.len(), PLACE_BYTES);
        let understood = ListeningPlace::of_text(&String::from_utf8_lossy(&told));
        assert_eq!((understood.node, understood.port), (here.node, 7));
        assert_eq!(understood.addresses, here.addresses);
    }

    #[test]
    fn who_listens_everywhere_is_reached_at_each_address() {
        let listener = TcpListener::bind(&EVERYWHERE[..]).expect("a free port");
        let port = listener.local_addr().expect("it is open").port();
        let here = ListeningPlace::here(port);
        let elsewhere = ListeningPlace { node: "elsewhere".to_owned(), addresses: Vec::new(), port: 0 };
        let by_loopback = ListeningPlace::here(port).from(&here)[0];
        for address in here.from(&elsewhere).into_iter().chain([by_loopback]) {
            TcpStream::connect(address).unwrap_or_else(|error| panic!("{address}: {error}"));
        }
    }

    #[test]
    fn a_process_is_reached_in_the_network_that_is_shared() {
        let place = |node: &str, addresses: &[&str]| ListeningPlace {
            node: node.to_owned(),
            addresses: addresses.iter().map(|address| address.parse().expect("an address")).collect(),
            port: 7,
        };
        let own = place("here", &["10.1.2.3", "172.17.0.1"]);
        let told = |place: ListeningPlace| ListeningPlace::of_text(&String::from_utf8_lossy(&place.told()));
        let there = told(place("there", &["172.17.0.1", "10.1.9.9", "192.168.1.1"])).from(&own);
        let there: Vec<String> = there.iter().map(SocketAddr::to_string).collect();
        assert_eq!(there, ["10.1.9.9:7", "192.168.1.1:7"]);
        let here = told(place("here", &["10.1.2.3"])).from(&own);
        let here: Vec<String> = here.iter().map(SocketAddr::to_string).collect();
        assert_eq!(here, ["127.0.0.1:7", "[::1]:7"]);
        // Of IPv6.
        let own = place("here", &["fd00:1::2"]);
        let there = told(place("there", &["fd00:2::9", "fd00:1::9"])).from(&own);
        let there: Vec<String> = there.iter().map(SocketAddr::to_string).collect();
        assert_eq!(there, ["[fd00:1::9]:7", "[fd00:2::9]:7"]);
        // No address is cut in two.
        let many: Vec<String> = (10..99).map(|host| format!("fd00:1:2:3:4:5:6:{host}")).collect();
        let some = told(place("there", &many.iter().map(String::as_str).collect::<Vec<_>>())).addresses;
        let some: Vec<String> = some.iter().map(IpAddr::to_string).collect();
        assert!(some.len() > 20 && some.len() < many.len() && many.starts_with(&some), "{some:?}");
    }
}
