#!/bin/sh
# The first process of a machine of tests/ray_up/lan.py, in namespaces of its own: files are those of the machine
# below until they are written to, processes and the network its own, /shared is the test's folder.
#
#   host.sh NAME VENV SHARED
set -eu
name=$1 venv=$2 shared=$3

hostname "$name"
mount --make-rprivate /
mount -t tmpfs tmpfs /mnt
mkdir /mnt/upper /mnt/work /mnt/root
mount -t overlay -o lowerdir=/,upperdir=/mnt/upper,workdir=/mnt/work overlay /mnt/root
cd /mnt/root
mkdir -p shared run/sshd tmp/ray home/ubuntu/.ssh root/.ray
mount -t proc proc proc
mount --rbind /sys sys
mount --rbind /dev dev
mount -t tmpfs -o size=12g tmpfs dev/shm
mount -t tmpfs tmpfs tmp/ray
mount -t tmpfs tmpfs root/.ray
mount --bind "$shared" shared

# The user of the cluster file: another name of root, to whom the installation may belong.
sed -i '1i ubuntu:*:0:0::/home/ubuntu:/bin/bash' etc/passwd
echo "127.0.0.1 localhost $name" > etc/hosts
touch home/ubuntu/.bashrc
ln -s "$venv" home/ubuntu/venv
# There is no way out of here: pip finds all that specdec needs installed, and builds specdec with what is installed.
printf '[global]\nno-index = true\n[install]\nno-build-isolation = false\n' > etc/pip.conf
cp shared/key.pub home/ubuntu/.ssh/authorized_keys
if [ "$name" = operator ]; then
    cp shared/key home/ubuntu/.ssh/id_ed25519
fi

exec chroot . /bin/sh -c '
    ip link set lo up
    /usr/sbin/sshd -D -f /dev/null -h /shared/host_key -o StrictModes=no -o PermitRootLogin=prohibit-password \
        -o PasswordAuthentication=no -o MaxStartups=100 -o PidFile=none -E /shared/'"$name"'.sshd.log &
    wait'
